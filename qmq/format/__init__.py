"""The bytes of QMQ: one format for wire, disk and Spark. No I/O, no clock."""
