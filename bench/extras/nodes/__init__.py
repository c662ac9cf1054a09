"""Run ranks on other machines through an agent on each of them. May import what lies below extras."""
