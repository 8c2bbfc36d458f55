    struct Body_%(name)s {
        enum { NDIM = %(ndim)i, INPUTS = %(n_inputs)i, OUTPUTS = %(n_outputs)i };
        static const bool broadcast[INPUTS][NDIM], summed[OUTPUTS][NDIM], sums[OUTPUTS];
        static const int types[OUTPUTS], sizes[INPUTS + OUTPUTS], inplace[OUTPUTS];

        template <bool USUAL>
        static void compute(npy_intp count, char *const *operands, const npy_intp *strides)
        {
            #pragma GCC ivdep
            for (npy_intp i = 0; i < count; ++i) {
                %(code)s
            }
        }

        static void compute(npy_intp count, char *const *operands, const npy_intp *strides)
        {
            static const npy_intp usual[] = %(usual)s;
            for (int i = 0; i < INPUTS + OUTPUTS; ++i)
                if (strides[i] != usual[i]) return compute<false>(count, operands, strides);
            compute<true>(count, operands, strides);
        }

        static void add(int output, double *sums, npy_intp stride, const void *values, npy_intp count)
        {
            if (types[output] == NPY_FLOAT32)
                synkhronos::add(sums, stride, (const npy_float32 *)values, count);
            else
                synkhronos::add(sums, stride, (const npy_float64 *)values, count);
        }
    };
    const bool Body_%(name)s::broadcast[INPUTS][NDIM] = %(broadcast)s;
    const bool Body_%(name)s::summed[OUTPUTS][NDIM] = %(summed)s;
    const bool Body_%(name)s::sums[OUTPUTS] = %(sums)s;
    const int Body_%(name)s::inplace[OUTPUTS] = %(inplace)s;
    const int Body_%(name)s::types[OUTPUTS] = %(types)s;
    const int Body_%(name)s::sizes[INPUTS + OUTPUTS] = %(sizes)s;
