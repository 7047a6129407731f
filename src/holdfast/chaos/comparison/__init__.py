"""Find where and why an attempt diverges from the undisturbed run.

Entry points are `timeline.compare` and `timeline.compare_undisturbed`. In reading order:

- `differences`: what can differ
- `reference`: the undisturbed run, and where in it an attempt continues
- `divergence`: the first step that differs, and the cause
- `saved_entries`: differences in saved checkpoints that no step shows
- `timeline`: all attempts of a trial together
"""
