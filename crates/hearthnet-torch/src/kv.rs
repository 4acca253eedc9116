//! Keys and values of all sequences, in tensors on the device.
//!
//! A sequence has two tensors for each layer of the engine, with room for whole pages of 32
//! positions. A sequence that outgrows its tensors is copied into larger ones, layer by layer. That
//! happens once in 32 positions, each of which reads all of them anyway. A fork shares the tensors
//! until one of the two sequences appends.
//!
//! Freed tensors are overwritten with zeros first, so that no caller's text outlives its sequence.

use std::cell::Cell;
use std::rc::Rc;

use hearthnet_engine::{EngineError, Footprint, Storage};
use tch::{Device, TchError, Tensor};

use crate::choice::Dtype;
use crate::error::TorchLoadError;

const PAGE: u32 = 32;

/// Shape and format of the keys and values of one position.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Geometry {
    pub(crate) layers: u32,
    pub(crate) heads: u32,
    /// Values per head.
    pub(crate) key: u32,
    pub(crate) value: u32,
    pub(crate) dtype: Dtype,
    pub(crate) device: Device,
}

impl Geometry {
    /// An unwritten tensor `[heads, positions, width]`.
    fn tensor(&self, pages: u32, width: u32) -> Result<Tensor, TchError> {
        let size = [
            self.heads.into(),
            i64::from(pages) * i64::from(PAGE),
            width.into(),
        ];
        Tensor::f_empty(size, (self.dtype.kind(), self.device))
    }
}

/// Keys and values of one sequence, or of several forks.
pub struct Buffers {
    /// Per layer, keys and values: `[heads, positions, width]`.
    layers: Vec<(Tensor, Tensor)>,
    /// Pages that every tensor has room for.
    pages: u32,
    /// Pages charged to `in_use`: more than `pages` after a resize that failed halfway.
    counted: u32,
    /// Pages of all sequences together.
    in_use: Rc<Cell<u64>>,
}

impl Buffers {
    fn new(geometry: &Geometry, pages: u32, in_use: &Rc<Cell<u64>>) -> Result<Self, TchError> {
        let layer = |_| {
            Ok::<_, TchError>((
                geometry.tensor(pages, geometry.key)?,
                geometry.tensor(pages, geometry.value)?,
            ))
        };
        let layers = (0..geometry.layers).map(layer).collect::<Result<_, _>>()?;
        in_use.set(in_use.get() + u64::from(pages));
        Ok(Self {
            layers,
            pages,
            counted: pages,
            in_use: Rc::clone(in_use),
        })
    }

    /// Keys and values of a layer, counted from the engine's first.
    pub(crate) fn layer(&self, layer: usize) -> Result<&(Tensor, Tensor), TchError> {
        let missing = || TchError::Shape(format!("no layer {layer} in the cache"));
        self.layers.get(layer).ok_or_else(missing)
    }

    /// Resizes all tensors to `pages`, keeping the first `len` positions. After an error there is
    /// still room for `len` positions, and tensors that have grown already are charged.
    fn resize(&mut self, geometry: &Geometry, pages: u32, len: u32) -> Result<(), TchError> {
        self.count(self.counted.max(pages));
        for (keys, values) in &mut self.layers {
            for (tensor, width) in [(keys, geometry.key), (values, geometry.value)] {
                let fresh = geometry.tensor(pages, width)?;
                copy(tensor, &fresh, len)?;
                let mut old = std::mem::replace(tensor, fresh);
                let _ = old.f_zero_()?;
            }
        }
        self.count(pages);
        self.pages = pages;
        Ok(())
    }

    fn count(&mut self, pages: u32) {
        let others = self.in_use.get().saturating_sub(self.counted.into());
        self.in_use.set(others + u64::from(pages));
        self.counted = pages;
    }
}

impl Drop for Buffers {
    fn drop(&mut self) {
        for (keys, values) in &mut self.layers {
            // If zeroing fails, the device has lost the contents anyway.
            let _ = (keys.f_zero_(), values.f_zero_());
        }
        self.count(0);
    }
}

/// Copies the first `len` positions.
fn copy(from: &Tensor, to: &Tensor, len: u32) -> Result<(), TchError> {
    let mut target = to.f_narrow(1, 0, len.into())?;
    target.f_copy_(&from.f_narrow(1, 0, len.into())?)
}

/// Memory for the sequences of an engine.
pub struct KvTensors {
    geometry: Geometry,
    in_use: Rc<Cell<u64>>,
}

impl KvTensors {
    pub(crate) fn new(geometry: Geometry) -> Self {
        Self {
            geometry,
            in_use: Rc::default(),
        }
    }

    /// Makes room for `pages`, in buffers that no other sequence shares.
    fn reserve(&self, buffers: &mut Rc<Buffers>, len: u32, pages: u32) -> Result<(), TchError> {
        match Rc::get_mut(buffers) {
            Some(own) if own.pages >= pages => {}
            Some(own) => own.resize(&self.geometry, pages, len)?,
            None => {
                let own = Buffers::new(&self.geometry, pages, &self.in_use)?;
                for (shared, own) in buffers.layers.iter().zip(&own.layers) {
                    copy(&shared.0, &own.0, len)?;
                    copy(&shared.1, &own.1, len)?;
                }
                *buffers = Rc::new(own);
            }
        }
        Ok(())
    }
}

impl Storage for KvTensors {
    type State = Rc<Buffers>;

    fn footprint(&self) -> Footprint {
        let Geometry {
            layers,
            heads,
            key,
            value,
            dtype,
            ..
        } = self.geometry;
        let values = u64::from(heads) * u64::from(key + value);
        Footprint {
            per_sequence: 0,
            per_position: values * u64::from(layers) * dtype.bytes() as u64,
            page: PAGE,
        }
    }

    fn pages_in_use(&self) -> u64 {
        self.in_use.get()
    }

    fn empty(&self) -> Result<Rc<Buffers>, EngineError> {
        let buffers = Buffers::new(&self.geometry, 0, &self.in_use);
        Ok(Rc::new(buffers.map_err(TorchLoadError::from)?))
    }

    fn fork(&mut self, buffers: &Rc<Buffers>) -> Rc<Buffers> {
        Rc::clone(buffers)
    }

    fn pages_needed(&self, buffers: &Rc<Buffers>, _: u32, end: u32) -> u64 {
        let own = match Rc::strong_count(buffers) {
            1 => buffers.pages,
            _ => 0,
        };
        end.div_ceil(PAGE).saturating_sub(own).into()
    }

    fn grow(&mut self, buffers: &mut Rc<Buffers>, len: u32, end: u32) -> Result<(), EngineError> {
        let _no_grad = tch::no_grad_guard();
        let grown = self.reserve(buffers, len, end.div_ceil(PAGE));
        Ok(grown.map_err(TorchLoadError::from)?)
    }

    fn shrink(&mut self, buffers: &mut Rc<Buffers>, len: u32) -> Result<u32, EngineError> {
        let _no_grad = tch::no_grad_guard();
        let pages = len.div_ceil(PAGE);
        if let Some(own) = Rc::get_mut(buffers)
            && own.counted > pages
        {
            let shrunk = own.resize(&self.geometry, pages, len);
            shrunk.map_err(TorchLoadError::from)?;
        }
        Ok(len)
    }
}
