"""What the harness itself costs. May import sweep's neighbours below: cell, experiments, request and on."""
