"""What strategies share: layouts, kernels on one device, and the bridge to packages."""
