"""The monitor: frames of a run, rules that judge them, actions, the report, the audit and the black box."""
