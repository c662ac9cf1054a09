"""What the harness itself costs. May import cell, request and all below."""
