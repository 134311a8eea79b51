"""What ranks print, and where it goes.

streams.py   the standard streams of ranks: to files, the terminal, the agent
console.py   the launcher's own standard streams
log_files.py the job's folder and the files in it; rotating_file.py: those with a limit; log_reader.py: read back
torch_logs_specs.py the same, by a class of somebody else's
"""
