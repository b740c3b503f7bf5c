"""Does `trainprobe why` name the true cause, from what recorded runs of the other benches left on disk?"""
