//! Model files that tests put together.

use hearthnet_files::gguf::writer::{WriteError, Writer};
use hearthnet_files::gguf::{Gguf, TensorInfo, TensorType};

/// File in memory: metadata, and tensors with their data in the order in which they are added.
#[derive(Debug, Default)]
pub struct NewFile {
    /// Takes the metadata. Tensors are added by the functions of this type.
    pub writer: Writer,
    data: Vec<Vec<u8>>,
}

impl NewFile {
    /// File without tensors, with those metadata of another one whose key is kept.
    ///
    /// # Panics
    /// If a key cannot be written.
    pub fn of(gguf: &Gguf, is_kept: impl Fn(&str) -> bool) -> Self {
        let mut file = Self::default();
        for (key, value) in gguf.metadata().filter(|(key, _)| is_kept(key)) {
            file.writer.set(key, value).expect("a key of the file");
        }
        file
    }

    /// Adds a tensor.
    ///
    /// # Panics
    /// If the name is not usable, or the type cannot have the dimensions.
    pub fn tensor(&mut self, name: &str, dims: &[u64], dtype: TensorType, data: Vec<u8>) {
        let added = self.writer.tensor(name, dims, dtype);
        added.expect("a tensor of whole blocks");
        self.data.push(data);
    }

    /// Adds a tensor whose data are zeros.
    ///
    /// # Panics
    /// As [`Self::tensor`].
    pub fn zeros(&mut self, name: &str, dims: &[u64], dtype: TensorType) {
        let rows: u64 = dims[1..].iter().product();
        let row = dtype.row_bytes(dims[0]).expect("rows of whole blocks");
        self.tensor(name, dims, dtype, vec![0; (row * rows) as usize]);
    }

    /// Adds a tensor of another file.
    ///
    /// # Panics
    /// As [`Self::tensor`].
    pub fn copy(&mut self, from: &Gguf, info: &TensorInfo) {
        let data = from.data(info).to_vec();
        self.tensor(&info.name, &info.dims, info.dtype, data);
    }

    /// The file's bytes.
    ///
    /// # Panics
    /// If the data of a tensor do not have its size.
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        let written = self.writer.write(&mut out, |index, out| {
            out.write_all(&self.data[index]).map_err(WriteError::Io)
        });
        written.expect("data of the tensor's size");
        out
    }

    /// The file, opened.
    ///
    /// # Panics
    /// As [`Self::bytes`].
    pub fn gguf(&self) -> Gguf {
        Gguf::from_bytes(self.bytes()).expect("a GGUF file")
    }
}
