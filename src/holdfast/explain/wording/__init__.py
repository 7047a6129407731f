"""Write the text of a verdict, without changing the cause that was chosen for it.

The entry point is `verdict_text.write_verdict`, which turns a `judgement.Judgement` into a
`Verdict`. ``sentences`` writes the title and the summary, with the help of ``remarks``. ``fixes``
chooses the fix, and ``verdict_evidence`` the evidence to show.
"""
