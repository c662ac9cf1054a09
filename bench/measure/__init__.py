"""What is done to a built cell: one file per pass, each giving one rank's part of a record's section."""
