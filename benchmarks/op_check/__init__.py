"""What op_check was calibrated on: torch's own sample inputs, planted bugs and healthy deviations."""
