"""The plane that decides: single-threaded, no I/O, no torch; time is a parameter."""
