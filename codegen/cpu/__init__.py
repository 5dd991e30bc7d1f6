"""The CPU back end: schedules (decisions), template variables, templates, and the C headers with the loops."""
