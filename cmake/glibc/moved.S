// SPDX-License-Identifier: Apache-2.0
//
// Functions that a newer C library has under a newer version, though they are what they were: those of libpthread,
// libdl and librt, which moved into libc in 2.34, and a few others.  Whoever calls one here, the C++ runtime included,
// jumps to the version of old, so that what is built runs from 2.28 on.  A jump, not a call: dlopen and dlsym go by
// their caller.  Each row is a section of its own, and rows that nobody uses are left out.
	.macro moved name, version
	.section .text.moved.\name, "ax", @progbits
	.globl \name
	.hidden \name
	.type \name, @function
\name:
	.cfi_startproc
	endbr64
	jmp *moved_\name@GOTPCREL(%rip)
	.cfi_endproc
	.size \name, .-\name
	.symver moved_\name, \name@GLIBC_\version
	.endm

	moved __pthread_key_create, 2.2.5
	moved pthread_create, 2.2.5
	moved pthread_detach, 2.2.5
	moved pthread_getspecific, 2.2.5
	moved pthread_join, 2.2.5
	moved pthread_key_create, 2.2.5
	moved pthread_key_delete, 2.2.5
	moved pthread_mutex_trylock, 2.2.5
	moved pthread_once, 2.2.5
	moved pthread_rwlock_rdlock, 2.2.5
	moved pthread_rwlock_unlock, 2.2.5
	moved pthread_rwlock_wrlock, 2.2.5
	moved pthread_setname_np, 2.12
	moved pthread_setspecific, 2.2.5
	moved pthread_sigmask, 2.2.5

	moved dladdr, 2.2.5
	moved dladdr1, 2.3.3
	moved dlclose, 2.2.5
	moved dlerror, 2.2.5
	moved dlinfo, 2.3.3
	moved dlopen, 2.2.5
#ifndef FOUNDRYD_HAS_DLSYM
	moved dlsym, 2.2.5
#endif

	moved shm_open, 2.2.5
	moved shm_unlink, 2.2.5

	.section .note.GNU-stack, "", @progbits
