#include "go_asm.h"
#include "textflag.h"

// func leastFours(costs *float64, n int) float64
//
// Of two numbers VMINPD takes the first one here, if one of them is none: what was the least
// so far.
TEXT ·leastFours(SB), NOSPLIT, $0-24
	MOVQ         costs+0(FP), SI
	MOVQ         n+8(FP), CX
	MOVQ         $const_infinite, AX
	VMOVQ        AX, X0
	VPBROADCASTQ X0, Y0
	VMOVAPD      Y0, Y1
	VMOVAPD      Y0, Y2
	VMOVAPD      Y0, Y3
	SUBQ         $16, CX
	JLT          few

sixteen:
	VMOVUPD (SI), Y4
	VMOVUPD 32(SI), Y5
	VMOVUPD 64(SI), Y6
	VMOVUPD 96(SI), Y7
	VMINPD  Y0, Y4, Y0
	VMINPD  Y1, Y5, Y1
	VMINPD  Y2, Y6, Y2
	VMINPD  Y3, Y7, Y3
	ADDQ    $128, SI
	SUBQ    $16, CX
	JGE     sixteen

few:
	ADDQ $16, CX
	JEQ  last

four:
	VMOVUPD (SI), Y4
	VMINPD  Y0, Y4, Y0
	ADDQ    $32, SI
	SUBQ    $4, CX
	JNE     four

last:
	VMINPD       Y1, Y0, Y0
	VMINPD       Y3, Y2, Y2
	VMINPD       Y2, Y0, Y0
	VEXTRACTF128 $1, Y0, X1
	VMINPD       X1, X0, X0
	VPERMILPD    $1, X0, X1
	VMINSD       X1, X0, X0
	VMOVSD       X0, ret+16(FP)
	VZEROUPPER
	RET

// NEAR finds which of four costs are not above the bar in Y0: 0x1d is "not less", and false
// where one is no number.
#define NEAR(offset, Y, R) \
	VCMPPD    $0x1d, offset(SI), Y0, Y \
	VMOVMSKPD Y, R

// func nearFours(costs *float64, n int, bar float64, near *[nearWords]uint64)
TEXT ·nearFours(SB), NOSPLIT, $0-32
	MOVQ         costs+0(FP), SI
	MOVQ         n+8(FP), R9
	VBROADCASTSD bar+16(FP), Y0
	MOVQ         near+24(FP), DI

word:
	XORL DX, DX
	XORL CX, CX  // bits in DX

some:
	CMPQ R9, $16
	JLT  four
	NEAR(0, Y1, AX)
	NEAR(32, Y2, BX)
	NEAR(64, Y3, R11)
	NEAR(96, Y4, R12)
	SHLL $4, BX
	SHLL $8, R11
	SHLL $12, R12
	ORL  BX, AX
	ORL  R12, R11
	ORL  R11, AX
	SHLQ CX, AX
	ORQ  AX, DX
	ADDQ $128, SI
	ADDL $16, CX
	SUBQ $16, R9
	JEQ  last
	CMPL CX, $64
	JNE  some
	MOVQ DX, (DI)
	ADDQ $8, DI
	JMP  word

four:
	NEAR(0, Y1, AX)
	SHLQ CX, AX
	ORQ  AX, DX
	ADDQ $32, SI
	ADDL $4, CX
	SUBQ $4, R9
	JNE  four

last:
	MOVQ DX, (DI)
	VZEROUPPER
	RET

// func alikeFours(candidates *Candidate, costs *float64, n int) bool
TEXT ·alikeFours(SB), NOSPLIT, $0-25
	MOVQ         candidates+0(FP), SI
	MOVQ         costs+8(FP), DI
	MOVQ         n+16(FP), CX
	VMOVDQU      (SI), Y0
	VPBROADCASTQ (DI), Y1

	// Of eight numbers Cached and InFlight, which come first, and Share, the seventh.
	VPCMPEQD Y2, Y2, Y2
	VPXOR    Y3, Y3, Y3
	VPBLENDD $0x43, Y2, Y3, Y2

four:
	VPXOR  (SI), Y0, Y3
	VPXOR  Candidate__size(SI), Y0, Y4
	VPXOR  (2*Candidate__size)(SI), Y0, Y5
	VPXOR  (3*Candidate__size)(SI), Y0, Y6
	VPXOR  (DI), Y1, Y7
	VPOR   Y4, Y3, Y3
	VPOR   Y6, Y5, Y5
	VPOR   Y5, Y3, Y3
	VPAND  Y2, Y3, Y3
	VPOR   Y7, Y3, Y3
	VPTEST Y3, Y3
	JNE    last
	ADDQ   $(4*Candidate__size), SI
	ADDQ   $32, DI
	SUBQ   $4, CX
	JNE    four

last:
	SETEQ ret+24(FP)
	VZEROUPPER
	RET
