"""The ranks of a cell on one machine: started, followed, asked, ended. May import workloads and all below."""
