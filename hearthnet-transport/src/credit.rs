//! Credit window, with all of its checked arithmetic in one type.
//!
//! Both ends of a direction keep the same [`Window`]. The sender takes one unit per TENSOR_DATA
//! frame and gets units back by ACK or NACK; the receiver takes one when the frame arrives and
//! gives it back when it acknowledges. `used` can never exceed `size`, on either end, so memory is
//! bounded by `size` chunks, and a peer that sends more is caught at the first surplus chunk.
//!
//! Worked example, window 2, a tensor of three chunks:
//!
//! ```text
//! sender                         receiver
//! take -> used 1   chunk 1 ----> take -> used 1
//! take -> used 2   chunk 2 ----> take -> used 2
//! take -> refused: waits         (copies chunk 1 and 2 out)
//! give_back(2)     <---- ACK 2   give_back(2) -> used 0
//! take -> used 1   chunk 3 ----> take -> used 1
//!                                (the application takes the tensor)
//! give_back(1)     <---- ACK 1   give_back(1) -> used 0
//! ```

use std::num::NonZeroU32;

use crate::code::{CloseCode, Violation};
use crate::config::MAX_WINDOW_CHUNKS;

/// Number of used units out of a granted number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Window {
    /// Units granted, used or not.
    pub(crate) size: u32,
    used: u32,
}

impl Window {
    /// A window of `size` units, none of them used.
    pub(crate) fn new(size: u32) -> Window {
        Window {
            size: size.min(MAX_WINDOW_CHUNKS),
            used: 0,
        }
    }

    /// Units that can still be taken.
    pub(crate) fn available(self) -> u32 {
        // `used <= size` always holds.
        self.size.saturating_sub(self.used)
    }

    /// Takes one unit.
    ///
    /// # Errors
    /// `credit_overrun` when none is left.
    pub(crate) fn take(&mut self) -> Result<(), Violation> {
        if self.used >= self.size {
            return Err(CloseCode::CreditOverrun
                .violation(format!("a chunk beyond the window of {}", self.size)));
        }
        self.used += 1;
        Ok(())
    }

    /// Returns units.
    ///
    /// # Errors
    /// `credit_ack` when that many are not in use.
    pub(crate) fn give_back(&mut self, units: u32) -> Result<(), Violation> {
        self.used = self.used.checked_sub(units).ok_or_else(|| {
            CloseCode::CreditAck.violation(format!(
                "{units} chunks acknowledged, {} are in flight",
                self.used
            ))
        })?;
        Ok(())
    }

    /// Widens the window.
    ///
    /// # Errors
    /// `credit_overflow` if it would exceed [`MAX_WINDOW_CHUNKS`].
    pub(crate) fn widen(&mut self, units: NonZeroU32) -> Result<(), Violation> {
        self.size = self
            .size
            .checked_add(units.get())
            .filter(|&size| size <= MAX_WINDOW_CHUNKS)
            .ok_or_else(|| {
                CloseCode::CreditOverflow
                    .violation(format!("a grant of {units} on a window of {}", self.size))
            })?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Clone, Debug)]
    enum Op {
        Take,
        GiveBack(u32),
        Widen(NonZeroU32),
    }

    fn op() -> impl Strategy<Value = Op> {
        let units = prop_oneof![0u32..40, any::<u32>()];
        prop_oneof![
            3 => Just(Op::Take),
            1 => units.clone().prop_map(Op::GiveBack),
            1 => units.prop_filter_map("a grant", |n| NonZeroU32::new(n).map(Op::Widen)),
        ]
    }

    proptest! {
        #[test]
        fn the_window_never_exceeds_what_was_granted(
            size in 1u32..=MAX_WINDOW_CHUNKS,
            ops in prop::collection::vec(op(), 0..200),
        ) {
            let mut window = Window::new(size);
            // The model: wide integers, no checks.
            let (mut granted, mut used) = (u64::from(size), 0u64);
            for op in ops {
                match op {
                    Op::Take => match window.take() {
                        Ok(()) => used += 1,
                        Err(violation) => {
                            prop_assert_eq!(used, granted);
                            prop_assert_eq!(violation.code, CloseCode::CreditOverrun);
                        }
                    },
                    Op::GiveBack(n) => match window.give_back(n) {
                        Ok(()) => used -= u64::from(n),
                        Err(violation) => {
                            prop_assert!(u64::from(n) > used);
                            prop_assert_eq!(violation.code, CloseCode::CreditAck);
                        }
                    },
                    Op::Widen(n) => match window.widen(n) {
                        Ok(()) => granted += u64::from(n.get()),
                        Err(violation) => {
                            prop_assert!(granted + u64::from(n.get()) > 1024);
                            prop_assert_eq!(violation.code, CloseCode::CreditOverflow);
                        }
                    },
                }
                prop_assert!(used <= granted && granted <= 1024);
                prop_assert_eq!(u64::from(window.available()), granted - used);
                prop_assert_eq!(u64::from(window.used), used);
            }
        }
    }

    #[test]
    fn a_grant_of_everything_twice_is_refused() {
        let mut window = Window::new(16);
        assert_eq!(
            window.widen(NonZeroU32::MAX).unwrap_err().code,
            CloseCode::CreditOverflow
        );
        assert_eq!(
            window.widen(NonZeroU32::MAX).unwrap_err().code,
            CloseCode::CreditOverflow
        );
        assert_eq!(window.available(), 16);
    }
}
