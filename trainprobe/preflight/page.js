// The page of preflight: all of it is written already.
onKeys();
ready();
