int codec(void);
int answer(void) { return codec(); }
