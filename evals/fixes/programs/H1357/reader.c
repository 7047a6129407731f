int codec_v2(void);
int answer(void) { return codec_v2(); }
