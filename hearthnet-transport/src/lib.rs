//! X08 tensor transport: tensors over mutually authenticated, flow-controlled WebSocket frames.
