"""Looking inside: diff, explain, verify, bisect, profile, report, golden outputs."""
