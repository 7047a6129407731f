raise ValueError("no file train.csv")
