"""Groups: members, settings, and what each message of a group is."""
