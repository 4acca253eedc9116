//! Pool of reference-counted slots of memory on a device: pages of keys and values, or states.

use crate::error::EngineError;

/// Memory of a pool. Slots are numbered from 0, in the order of [`Self::add`].
pub trait PoolMemory {
    /// Returns true if slots have no content, because no layer needs them.
    fn is_empty(&self) -> bool;

    /// Makes room for one more slot, of zeros.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`] and errors of the device. Then there is none more.
    fn add(&mut self) -> Result<(), EngineError>;

    /// Fills slots with zeros.
    fn clear(&mut self, slots: &[usize]);
}

/// Slots with their owners, grown on demand.
pub(crate) struct Pool<M> {
    pub(crate) memory: M,
    /// Number of owners of each slot. A sequence may own one twice.
    owners: Vec<u32>,
    /// Slots without owners, filled with zeros.
    spare: Vec<usize>,
}

impl<M: PoolMemory> Pool<M> {
    pub(crate) fn new(memory: M) -> Self {
        Self {
            memory,
            owners: Vec::new(),
            spare: Vec::new(),
        }
    }

    /// Number of slots with an owner.
    pub(crate) fn in_use(&self) -> usize {
        self.owners.len() - self.spare.len()
    }

    /// Takes a slot of zeros, with one owner.
    pub(crate) fn take(&mut self) -> Result<usize, EngineError> {
        if let Some(slot) = self.spare.pop() {
            self.owners[slot] = 1;
            return Ok(slot);
        }
        self.memory.add()?;
        self.owners.push(1);
        Ok(self.owners.len() - 1)
    }

    pub(crate) fn is_shared(&self, slot: usize) -> bool {
        self.owners[slot] > 1
    }

    /// Adds an owner to each slot.
    pub(crate) fn share(&mut self, slots: impl IntoIterator<Item = usize>) {
        slots.into_iter().for_each(|slot| self.owners[slot] += 1);
    }

    /// Removes an owner of a shared slot.
    pub(crate) fn release(&mut self, shared: usize) {
        self.owners[shared] -= 1;
    }

    /// Removes an owner of each slot, and frees the slots that have none left.
    pub(crate) fn free(&mut self, slots: impl IntoIterator<Item = usize>) {
        let mut freed = Vec::new();
        for slot in slots {
            self.owners[slot] -= 1;
            if self.owners[slot] == 0 {
                freed.push(slot);
            }
        }
        if !freed.is_empty() {
            self.memory.clear(&freed);
            self.spare.append(&mut freed);
        }
    }
}
