"""The version of QMQ. It stands here, since a program that is packed into one file has no metadata of its packages."""

VERSION = "0.1.0"
