"""How fast QMQ is on this machine: `qmq bench`. A broker, and load generators, as processes of their own."""
