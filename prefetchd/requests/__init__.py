"""The request types of each kernel family: what an entry point is told, with every field that changes a kernel."""
