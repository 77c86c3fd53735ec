"""How a request begins: planned, admitted or forked, its cached prefix brought up before."""
