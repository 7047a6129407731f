"""Find where and why an attempt diverges from the undisturbed run.

The entry points are `timeline.compare` and `timeline.compare_undisturbed`. In reading order:

- `differences`: the kinds of differences
- `reference`: the undisturbed run, and the place in it at which an attempt continues
- `divergence`: the first step that differs, and the cause of the difference
- `saved_entries`: differences in saved checkpoints that do not show in any step
- `timeline`: the comparison of all attempts of a trial
"""
