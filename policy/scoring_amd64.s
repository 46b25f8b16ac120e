#include "go_asm.h"
#include "textflag.h"

// The numbers of the i-th of four candidates: those of 32 bits, and those of 64.
#define counts(i) (i*Candidate__size + Candidate_Cached)(SI)
#define times(i) (i*Candidate__size + Candidate_Wait)(SI)

// What is the same for all candidates, four times each, on the stack at a multiple of 32.
#define HALF 0(R8)
#define HALFALL 32(R8)
#define OWN 64(R8)
#define REQUEST 96(R8)
#define ALWAYS 128(R8)
#define BUSY 160(R8)
#define COMPANY 192(R8)
// Four times this and then four times the most that a number of 32 bits can be, or the
// other way round.
#define TOKENS 224(R8)
#define PRESSED 256(R8)
// The bits of 1, of 32 bits.
#define SHARE 288(R8)

// func scoreFours(s *scoring, candidates *Candidate, costs *float64, n int)
//
// The operations on a candidate's numbers are those of scoring.block in the same order, and
// none is fused. Shares and full caches are compared by their bits: that finds all that has
// to be found, and may find what is no number, which makes no difference to complete.
TEXT ·scoreFours(SB), NOSPLIT, $352-32
	MOVQ s+0(FP), BX
	MOVQ candidates+8(FP), SI
	MOVQ costs+16(FP), DI
	MOVQ n+24(FP), R9
	SHRQ $2, R9
	LEAQ 31(SP), R8
	ANDQ $~31, R8

	VPCMPEQD     Y1, Y1, Y1
	VPSRLD       $1, Y1, Y1
	VPBROADCASTD scoring_tokens(BX), X0
	VCVTDQ2PD    X0, Y13                    // all tokens
	VINSERTI128  $0, X0, Y1, Y0
	VMOVDQA      Y0, TOKENS
	VPBROADCASTD scoring_pressed(BX), X0
	VINSERTI128  $1, X0, Y1, Y0
	VMOVDQA      Y0, PRESSED
	MOVL         $0x3f800000, AX
	VMOVD        AX, X0
	VPBROADCASTD X0, Y0
	VMOVDQA      Y0, SHARE
	MOVQ         $0x3fe0000000000000, AX
	VMOVQ        AX, X0
	VPBROADCASTQ X0, Y0
	VMOVAPD      Y0, HALF
	VMULPD       Y0, Y13, Y0
	VMOVAPD      Y0, HALFALL
	VBROADCASTSD scoring_own(BX), Y0
	VMOVAPD      Y0, OWN
	VBROADCASTSD scoring_request(BX), Y0
	VMOVAPD      Y0, REQUEST
	VBROADCASTSD scoring_toll+toll_always(BX), Y0
	VMOVAPD      Y0, ALWAYS
	VBROADCASTSD scoring_toll+toll_busy(BX), Y0
	VMOVAPD      Y0, BUSY
	VBROADCASTSD scoring_company(BX), Y0
	VMOVAPD      Y0, COMPANY

	VXORPD Y11, Y11, Y11             // the sum of the costs
	VXORPD Y12, Y12, Y12             // that of the requests, weighed
	VPXOR  Y15, Y15, Y15             // the bits of the requests, and others behind them
	LEAQ   scoring_special(BX), R10
	LEAQ   scoring_busiest(BX), R11

block:
	VMOVUPD (R11), Y14
	MOVL    $(const_scoredBlock/4), CX

four:
	// A number of all four is in one half of a register, and another one in the other.
	VMOVDQU     counts(0), Y0
	VMOVDQU     counts(1), Y8
	VMOVDQU     counts(2), Y1
	VMOVDQU     counts(3), Y9
	VPUNPCKLDQ  Y8, Y0, Y2
	VPUNPCKHDQ  Y8, Y0, Y0
	VPUNPCKLDQ  Y9, Y1, Y3
	VPUNPCKHDQ  Y9, Y1, Y1
	VPUNPCKLQDQ Y3, Y2, Y4   // Cached and Decoding
	VPUNPCKHQDQ Y3, Y2, Y5   // InFlight and Company
	VPUNPCKLQDQ Y1, Y0, Y6   // CachedGPU and Share
	VPUNPCKHQDQ Y1, Y0, Y7   // Busy and KV

	// Who has less on the GPU than it has, or of its share than 1, or a full cache.
	VPMINSD   TOKENS, Y4, Y4
	VPBLENDD  $0xf0, SHARE, Y4, Y0
	VPCMPGTD  Y6, Y0, Y0
	VPCMPGTD  PRESSED, Y7, Y1
	VPOR      Y1, Y0, Y0
	VMOVMSKPS Y0, AX
	MOVB      AX, (R10)
	VPOR      Y5, Y15, Y15

	VCVTDQ2PD    X4, Y1      // held
	VEXTRACTI128 $1, Y4, X4
	VCVTDQ2PD    X4, Y4      // decoding
	VEXTRACTI128 $1, Y5, X6
	VCVTPS2PD    X6, Y6      // company
	VCVTDQ2PD    X5, Y5      // requests
	VCVTPS2PD    X7, Y0      // busy

	VMOVUPD     times(0), Y2
	VMOVUPD     times(1), Y9
	VMOVUPD     times(2), Y3
	VMOVUPD     times(3), Y10
	VUNPCKLPD   Y9, Y2, Y7
	VUNPCKHPD   Y9, Y2, Y8
	VUNPCKLPD   Y10, Y3, Y2
	VUNPCKHPD   Y10, Y3, Y3
	VPERM2F128  $0x31, Y2, Y7, Y9  // B
	VPERM2F128  $0x31, Y3, Y8, Y10 // D
	VINSERTF128 $1, X2, Y7, Y7     // Wait
	VINSERTF128 $1, X3, Y8, Y8     // A

	VSUBPD Y1, Y13, Y2      // uncached
	VMULPD HALF, Y1, Y1
	VADDPD HALFALL, Y1, Y1
	VMULPD Y1, Y9, Y1
	VADDPD Y1, Y8, Y1
	VMULPD Y1, Y2, Y1
	VADDPD Y10, Y1, Y1      // fill
	VSUBPD Y4, Y5, Y4
	VMULPD REQUEST, Y4, Y4
	VADDPD OWN, Y4, Y4
	VMULPD Y1, Y4, Y4
	VMULPD BUSY, Y0, Y0
	VADDPD ALWAYS, Y0, Y0
	VMULPD Y0, Y2, Y2
	VADDPD Y2, Y4, Y4
	VMULPD COMPANY, Y6, Y6
	VADDPD Y6, Y4, Y4
	VADDPD Y7, Y4, Y4       // cost

	VMOVUPD Y4, (DI)
	VADDPD  Y4, Y11, Y11
	VMULPD  Y5, Y8, Y8
	VADDPD  Y8, Y12, Y12
	VMAXPD  Y8, Y14, Y14

	ADDQ $(4*Candidate__size), SI
	ADDQ $32, DI
	INCQ R10
	DECQ R9
	JEQ  last
	DECL CX
	JNE  four

	VMOVUPD Y14, (R11)
	ADDQ    $32, R11
	JMP     block

last:
	VMOVUPD Y14, (R11)

	VEXTRACTF128 $1, Y11, X0
	VADDPD       X0, X11, X0
	VHADDPD      X0, X0, X0
	VADDSD       scoring_costs(BX), X0, X0
	VMOVSD       X0, scoring_costs(BX)
	VEXTRACTF128 $1, Y12, X0
	VADDPD       X0, X12, X0
	VHADDPD      X0, X0, X0
	VADDSD       scoring_weighed(BX), X0, X0
	VMOVSD       X0, scoring_weighed(BX)
	VPSHUFD      $0x4e, X15, X0
	VPOR         X0, X15, X0
	VMOVQ        X0, AX
	MOVQ         AX, CX
	SHRQ         $32, CX
	ORL          CX, AX
	ORL          AX, scoring_inFlight(BX)
	VZEROUPPER
	RET
