"""The parts of HFGpuMonitor: what it reads, how it judges, what it writes."""
