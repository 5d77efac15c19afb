/* tables.cuh - one launch for a whole list of tensors.
 *
 * Every tensor is cut into pieces of PIECE elements, a block each (clipping: blocks take pieces in turns), and the pieces of all
 * tensors are numbered through. The list of tensors is a kernel parameter (a Table by value): no copy to the device, nothing to
 * keep alive, and a block finds its tensor by bisection in constant memory. Lists that are longer than a table (some hundreds)
 * take a launch per table.
 */
#pragma once

#include "common/cuda.cuh"

/* Elements; a multiple of every vector's width, so pieces begin where their tensor does, modulo 16 bytes. */
static const int PIECE = 8192;
static const int THREADS = 256; /* of a block */

#if CUDART_VERSION >= 12010
static const int PARAMETER_BYTES = 32764;
#else
static const int PARAMETER_BYTES = 4096;
#endif
static const int OTHER_BYTES = 160; /* of them for the kernel's other parameters */

/* Item i owns the pieces first[i] .. first[i + 1] - 1. An int is enough for 2^44 elements. */
template <typename Item> struct Table {
    static const int ROOM = (PARAMETER_BYTES - OTHER_BYTES - 16) / (int)(sizeof(Item) + sizeof(int));
    int count;
    int first[ROOM + 1];
    Item item[ROOM];
};

/* The item that owns a piece: the last one whose first piece is not after it. */
template <typename Item> __device__ inline int item_of(const Table<Item> &table, int piece) {
    int low = 0, high = table.count; /* first[low] <= piece < first[high] */
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (table.first[middle] <= piece) low = middle;
        else high = middle;
    }
    return low;
}

/* Calls launch(table, pieces) for as many tables as it takes; make(i) gives the item of tensor i. An empty tensor has `of_empty`
 * pieces; without one it is left out. */
template <typename Item, typename Make, typename Launch>
static void by_tables(int64_t count, int of_empty, Make make, Launch launch) {
    Table<Item> table;
    table.count = 0;
    table.first[0] = 0;
    for (int64_t i = 0; i < count; i++) {
        const Item item = make(i);
        const int pieces = item.numel > 0 ? (int)xt_divide_up(item.numel, PIECE) : of_empty;
        if (pieces > 0) {
            table.item[table.count] = item;
            table.first[table.count + 1] = table.first[table.count] + pieces;
            table.count++;
        }
        if (table.count == 0 || (table.count < Table<Item>::ROOM && i + 1 < count)) continue;
        launch(table, table.first[table.count]);
        table.count = 0;
    }
}

/* f(T()) for the dtype of an item: the same branch for all threads of a block. */
template <typename F> __device__ inline void by_dtype(int dtype, F f) {
    switch (dtype) {
    case XT_FLOAT32: f(float()); break;
    case XT_FLOAT64: f(double()); break;
    case XT_BFLOAT16: f(XtBf16()); break;
    default: f(XtF16()); break;
    }
}
