"""Send messages of an archive to a broker: above qmq.archive, which reads, and qmq.net.client, which sends."""
