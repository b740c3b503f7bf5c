"""The open bench: silent bugs of public threads, put into trainings in other people's style and watched under a user's plan."""
