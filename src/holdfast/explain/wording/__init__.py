"""Write the text of a verdict. The cause was chosen before and does not change here.

Entry point: `verdict_words.in_words`, which turns a `judgement.Judgement` into a `Verdict`.
"""
