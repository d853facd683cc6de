"""The model as a column: ``pipemax_udf``, its form in SQL, and functions that need no prompt of the user's."""
