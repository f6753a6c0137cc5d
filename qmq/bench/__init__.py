"""`qmq bench`: measure the speed of QMQ on this machine, with a broker and load generators as processes of their
own.
"""
