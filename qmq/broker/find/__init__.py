"""Answers clients that look for messages: one by its id, or all of a selection, a bounded step at a time; and hands
stored messages out again.

Looking changes nothing: no cursor, no group. The order of a search is that of the store: by stamp, and within a batch
by ordinal. A step reads rows of the consumer logs (rows.py), or by a key those of the batches that threads have found
(hash_search.py), and answers with batches and pieces (find.py). The client asks for the next step. A right to look,
once there are rights, is checked in ``Finds.get`` and ``Finds.find``, with an error of its own.

A resend (resend.py) finds its messages by subject and sequence (resend_selection.py), and makes retries of those that
a group is through with (resend_group.py).
"""
