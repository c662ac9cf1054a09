"""One cell in, one record out. May import request, workloads and all below."""
