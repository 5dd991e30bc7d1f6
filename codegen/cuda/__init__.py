"""The CUDA back end: schedules, launches, template variables, templates and headers."""
