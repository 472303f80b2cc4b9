// SPDX-License-Identifier: Apache-2.0
//
// How many stream captures run in this process.  While one does, synchronising a context or a stream is illegal in
// every capture mode and would invalidate it, so whoever wants to synchronise asks here first.
// The overrides of cuStreamBeginCapture* and cuStreamEndCapture keep the number.
#ifndef FOUNDRYD_HOOK_SUPPORT_CAPTURES_H
#define FOUNDRYD_HOOK_SUPPORT_CAPTURES_H

namespace foundryd::captures {

void began() noexcept;
void ended() noexcept;
bool any() noexcept;

}  // namespace foundryd::captures

#endif  // FOUNDRYD_HOOK_SUPPORT_CAPTURES_H
