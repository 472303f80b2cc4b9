// SPDX-License-Identifier: Apache-2.0
//
// The hook's dlsym and dlvsym.  Both ask a C++ function what to do and then either answer, or *jump* to the C library's
// own function with the caller's registers and return address as they were: RTLD_NEXT and RTLD_DEFAULT mean "as seen
// from the caller", and the C library tells the caller by its return address.  A call from here would make the hook
// the caller of every lookup in the process.
#if !defined(__x86_64__)
#error "write this file for the new architecture: two functions that tail-call with the return address kept"
#endif

	.text

// Route { void *jump; void *value; } fdy_route_dlsym(handle, name, caller)
	.globl dlsym
	.type dlsym, @function
	.p2align 4
dlsym:
	.cfi_startproc
	endbr64
	pushq %rdi
	.cfi_adjust_cfa_offset 8
	pushq %rsi
	.cfi_adjust_cfa_offset 8
	subq $8, %rsp
	.cfi_adjust_cfa_offset 8
	movq 24(%rsp), %rdx
	call fdy_route_dlsym
	addq $8, %rsp
	.cfi_adjust_cfa_offset -8
	popq %rsi
	.cfi_adjust_cfa_offset -8
	popq %rdi
	.cfi_adjust_cfa_offset -8
	testq %rax, %rax
	jz 1f
	jmpq *%rax
1:
	movq %rdx, %rax
	ret
	.cfi_endproc
	.size dlsym, .-dlsym

// Route fdy_route_dlvsym(handle, name, version, caller)
	.globl dlvsym
	.type dlvsym, @function
	.p2align 4
dlvsym:
	.cfi_startproc
	endbr64
	pushq %rdi
	.cfi_adjust_cfa_offset 8
	pushq %rsi
	.cfi_adjust_cfa_offset 8
	pushq %rdx
	.cfi_adjust_cfa_offset 8
	movq 24(%rsp), %rcx
	call fdy_route_dlvsym
	movq %rdx, %r11
	popq %rdx
	.cfi_adjust_cfa_offset -8
	popq %rsi
	.cfi_adjust_cfa_offset -8
	popq %rdi
	.cfi_adjust_cfa_offset -8
	testq %rax, %rax
	jz 1f
	jmpq *%rax
1:
	movq %r11, %rax
	ret
	.cfi_endproc
	.size dlvsym, .-dlvsym

	.section .note.GNU-stack, "", @progbits
