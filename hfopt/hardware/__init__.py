"""The card and the machine around it: detected through NVML and psutil, or looked up in the catalog."""
