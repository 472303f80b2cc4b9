// SPDX-License-Identifier: Apache-2.0
//
// Collectives, point to point, groups and user operators.
#include <cstring>

#include "api.h"
#include "communicator.h"
#include "group.h"

namespace ncclstub::api {
namespace {

// Which buffers this rank's side of a call reads and writes.
bool reads(const Task &task, int rank) {
  if (task.kind == OpKind::broadcast || task.kind == OpKind::scatter) return task.peer == rank;
  return task.kind != OpKind::recv;
}

bool writes(const Task &task, int rank) {
  if (task.kind == OpKind::reduce || task.kind == OpKind::gather) return task.peer == rank;
  return task.kind != OpKind::send;
}

ncclResult_t check_reduction(ncclComm_t comm, const Task &task) {
  if (!can_reduce(task.type)) {
    return fail(ncclInvalidArgument, "data type %d cannot be reduced by this library: use types 0 to 9", task.type);
  }
  if (task.op >= ncclSum && task.op < ncclNumOps) return ncclSuccess;
  if (!comm->has_op(task.op)) {
    return fail(ncclInvalidArgument, "reduction %d is neither built in nor made for this communicator: correct it",
                task.op);
  }
  if (comm->premul(task.op).type == task.type) return ncclSuccess;
  return fail(ncclInvalidArgument, "reduction %d was made for data type %d, not %d: use it with its own", task.op,
              comm->premul(task.op).type, task.type);
}

ncclResult_t check(ncclComm_t comm, const Task &task) {
  NCCL_TRY(check_handle(comm));
  NCCL_TRY(comm->async_error());  // its sentence is in ncclGetLastError(comm)
  const char *name = op_name(task.kind);
  if (comm->finalized || comm->revoked) {
    return fail(ncclInvalidUsage, "the communicator of this %s is %s, not active: make another one", name,
                comm->revoked ? "revoked" : "finalized");
  }
  if (task.type < 0 || task.type >= ncclNumTypes) {
    return fail(ncclInvalidArgument, "data type %d does not exist: use one from 0 below %d", task.type, ncclNumTypes);
  }
  const bool has_peer = task.kind != OpKind::all_reduce && task.kind != OpKind::reduce_scatter &&
                        task.kind != OpKind::all_gather && task.kind != OpKind::all_to_all;
  if (has_peer && (task.peer < 0 || task.peer >= comm->size)) {
    return fail(ncclInvalidArgument, "rank %d of this %s is not one of %d: correct it", task.peer, name, comm->size);
  }
  if (is_reduction(task.kind)) NCCL_TRY(check_reduction(comm, task));
  const bool lacks_send = reads(task, comm->rank) && task.send == nullptr;
  const bool lacks_recv = writes(task, comm->rank) && task.recv == nullptr;
  if (task.count > 0 && (lacks_send || lacks_recv)) {
    return fail(ncclInvalidArgument, "the %s buffer of this %s is NULL: pass an address",
                lacks_send ? "send" : "receive", name);
  }
  return ncclSuccess;
}

ncclResult_t call(ncclComm_t comm, const Task &task, ncclStream_t stream) {
  NCCL_TRY(group_failed(check(comm, task)));
  return enqueue(comm, task, stream);
}

}  // namespace

ncclResult_t ncclAllReduce(const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, ncclStream_t stream) {
  return call(comm, {OpKind::all_reduce, type, op, -1, send, recv, count}, stream);
}

ncclResult_t ncclReduce(const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                        ncclComm_t comm, ncclStream_t stream) {
  return call(comm, {OpKind::reduce, type, op, root, send, recv, count}, stream);
}

ncclResult_t ncclReduceScatter(const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, ncclStream_t stream) {
  return call(comm, {OpKind::reduce_scatter, type, op, -1, send, recv, count}, stream);
}

ncclResult_t ncclAllGather(const void *send, void *recv, size_t count, ncclDataType_t type, ncclComm_t comm,
                           ncclStream_t stream) {
  return call(comm, {OpKind::all_gather, type, ncclSum, -1, send, recv, count}, stream);
}

ncclResult_t ncclAlltoAll(const void *send, void *recv, size_t count, ncclDataType_t type, ncclComm_t comm,
                          ncclStream_t stream) {
  return call(comm, {OpKind::all_to_all, type, ncclSum, -1, send, recv, count}, stream);
}

ncclResult_t ncclBroadcast(const void *send, void *recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           ncclStream_t stream) {
  return call(comm, {OpKind::broadcast, type, ncclSum, root, send, recv, count}, stream);
}

ncclResult_t ncclBcast(void *buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                       ncclStream_t stream) {
  return call(comm, {OpKind::broadcast, type, ncclSum, root, buffer, buffer, count}, stream);
}

ncclResult_t ncclGather(const void *send, void *recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                        ncclStream_t stream) {
  return call(comm, {OpKind::gather, type, ncclSum, root, send, recv, count}, stream);
}

ncclResult_t ncclScatter(const void *send, void *recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                         ncclStream_t stream) {
  return call(comm, {OpKind::scatter, type, ncclSum, root, send, recv, count}, stream);
}

ncclResult_t ncclSend(const void *send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      ncclStream_t stream) {
  return call(comm, {OpKind::send, type, ncclSum, peer, send, nullptr, count}, stream);
}

ncclResult_t ncclRecv(void *recv, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, ncclStream_t stream) {
  return call(comm, {OpKind::recv, type, ncclSum, peer, nullptr, recv, count}, stream);
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t type,
                                      ncclScalarResidence_t residence, ncclComm_t comm) {
  NCCL_TRY(check_handle(comm));
  if (op == nullptr || scalar == nullptr) {
    return fail(ncclInvalidArgument, "the operator (%p) and the scalar (%p) need addresses: pass both",
                static_cast<void *>(op), scalar);
  }
  if (type < 0 || type >= ncclNumTypes) {
    return fail(ncclInvalidArgument, "data type %d does not exist: use one from 0 below %d", type, ncclNumTypes);
  }
  PreMul value{type, 0, residence == ncclScalarDevice};
  if (value.scalar_on_device) {
    value.scalar = reinterpret_cast<uint64_t>(scalar);
  } else {
    std::memcpy(&value.scalar, scalar, type_bytes(type));
  }
  *op = comm->add_op(value);
  return ncclSuccess;
}

ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
  NCCL_TRY(check_handle(comm));
  if (op >= ncclNumOps && comm->remove_op(op)) return ncclSuccess;
  return fail(ncclInvalidArgument, "reduction %d was not made for this communicator: destroy only what was made", op);
}

ncclResult_t ncclGroupStart() {
  return group_start();
}

ncclResult_t ncclGroupEnd() {
  return group_end();
}

ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t *info) {
  NCCL_TRY(group_drop());
  if (info == nullptr) return ncclSuccess;
  if (info->magic != kSimInfoMagic) {
    return fail(ncclInvalidArgument, "the simulation info has magic 0x%x, not 0x%x: use NCCL_SIM_INFO_INITIALIZER",
                info->magic, kSimInfoMagic);
  }
  info->estimated_time = 0;  // nothing is known of a GPU's speed here
  return ncclSuccess;
}

}  // namespace ncclstub::api
