"""Write the text of a verdict, without changing the cause that was chosen for it.

The entry point is `verdict_words.in_words`, which turns a `judgement.Judgement` into a `Verdict`.
"""
