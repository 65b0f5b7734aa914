"""The request types of each kernel family: an entry point's arguments, with all that changes a kernel."""
