//! Bind groups that were used before.

use std::collections::HashMap;

use parking_lot::Mutex;

use crate::kernels::Access;

/// Bind groups by the accesses of a kernel and the ids of its buffers. A group holds its buffers, so
/// it goes with the first of them.
#[derive(Debug, Default)]
pub(crate) struct GroupCache {
    groups: Mutex<HashMap<GroupKey, wgpu::BindGroup>>,
}

type GroupKey = (&'static [Access], Vec<u64>);

impl GroupCache {
    pub(crate) fn find(
        &self,
        key: GroupKey,
        new: impl FnOnce() -> wgpu::BindGroup,
    ) -> wgpu::BindGroup {
        self.groups.lock().entry(key).or_insert_with(new).clone()
    }

    pub(crate) fn forget(&self, buffer: u64) {
        // Dropped after the lock is released: a group may hold the last reference to other buffers.
        let gone: Vec<_> = {
            let mut groups = self.groups.lock();
            groups
                .extract_if(|(_, ids), _| ids.contains(&buffer))
                .collect()
        };
        drop(gone);
    }
}
