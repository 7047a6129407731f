"""Put a judgement into words. The cause has already been chosen; nothing here changes it.

Entry point: `verdict_words.in_words`, which turns a `judgement.Judgement` into a `Verdict`.
"""
