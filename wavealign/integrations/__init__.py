"""WaveAlign underneath other libraries; nothing here is imported unless it is asked for."""
