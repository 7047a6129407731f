int codec(void) { return 42; }
