"""``client.admin``: its calls, and the results that they return."""
