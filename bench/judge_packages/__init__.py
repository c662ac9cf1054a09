"""What the installed packages can do, found by the gates. May import cell and all below."""
